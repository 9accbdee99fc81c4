"""Tasks in PyTorch, with everything of a run: policy, ledger, DP-SGD, claims and report."""
