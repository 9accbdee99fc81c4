"""ServerApp: construction of the strategy and its mechanism, the rounds, the statement about a run, and the reports."""
