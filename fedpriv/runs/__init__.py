"""A run's folder: its files and their rows, the code that writes and reads them, and the status that they show."""
