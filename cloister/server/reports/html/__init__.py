"""The page about a run that an officer reads and signs: facts, words, figures, page, and an entry for a registry."""
