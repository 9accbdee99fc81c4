"""What privacy costs on this machine, for one task and configuration: `cloister bench`. Inputs are random numbers."""
