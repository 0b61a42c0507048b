"""From plans to programs: compose, lower, check and search."""
