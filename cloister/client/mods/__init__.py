"""Steps around a node's handler for each message, from the outermost inwards."""
