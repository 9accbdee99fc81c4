"""What releases cost: events, their composition, budgets over them and the ledger that remembers them."""
