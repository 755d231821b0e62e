"""What leaves a run: answers of its saved models, folders that load without fedpriv, model cards, and the Hub."""
