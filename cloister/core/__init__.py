"""The leaf that every other part may import: errors, checks, plugins, named arrays, cohorts, threads."""
