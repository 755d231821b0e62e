"""Studies: models that are trained, measured and checked to show what a part of the library does."""
