"""Configuration files: typed sections, one strict parser, and one format of error messages."""
