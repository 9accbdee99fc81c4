"""A Flower app as Flower's documentation has it: a server app, a client app, and a strategy between them."""
