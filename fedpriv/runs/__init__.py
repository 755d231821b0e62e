"""A run's folder: the files in it, their rows, who writes and who reads them, and the status that they show."""
