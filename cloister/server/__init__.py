"""The ServerApp: from a configuration to a decorated strategy, the round loop, and what a run leaves behind."""
