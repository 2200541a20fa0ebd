"""Workers: page tables, arenas, and attention where the pages are."""
