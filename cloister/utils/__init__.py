"""Base package without internal dependencies: errors, checks, plugins, named arrays, cohorts, threads."""
