"""A private head on a frozen backbone: digits 5 to 9 are private, and 0 to 4 are public."""
