"""How a client trains: the plan that a message asks for, and the trainers of DP-SGD."""
