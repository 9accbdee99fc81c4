"""Privacy costs of a planned run, for `cloister plan`. Nothing is sent, charged or written."""
