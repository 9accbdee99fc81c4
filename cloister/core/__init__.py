"""The leaf everything else stands on: errors, checks, configuration, plugins, arrays, cohorts."""
