"""Many variants of one model, answered over HTTP in shared passes of its frozen base."""
