"""Base of all other packages: errors, checks, plugins, named arrays, cohorts, messages, keys, files, threads."""
