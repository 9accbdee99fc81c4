"""The ServerApp: from a configuration to a strategy inside its mechanism, the round loop, and what a run leaves behind."""
