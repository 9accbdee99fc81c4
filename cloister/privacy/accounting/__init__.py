"""Privacy accounting: events of releases, their composition, budgets, and the ledger that stores them."""
