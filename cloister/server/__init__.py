"""ServerApp: construction of the strategy and its mechanism, the round loop, and the reports."""
