"""What happens to a message on a node, around its handler, from the door inwards."""
