"""Start-up kits of a federation: its description, and the files that each member gets."""
