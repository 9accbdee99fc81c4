"""Provisioning: from one description of a federation to a start-up kit for each of its members."""
