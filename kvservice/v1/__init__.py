"""Generated from proto/kvservice/v1; never edited. See `make proto`."""
