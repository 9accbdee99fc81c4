"""Local training of a client: the plan of a round, and the trainers of DP-SGD."""
