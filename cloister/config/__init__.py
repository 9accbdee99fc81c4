"""The run configuration and every other file of settings: sections, one strict parser, one text for errors."""
