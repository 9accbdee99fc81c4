"""The ServerApp: from a configuration to a strategy inside its mechanism, the round loop, and the reports of a run."""
