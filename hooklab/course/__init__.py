"""Everything that belongs to the lessons and not to hooks: set-up, checks, messages, languages."""
