"""The messages of a round: the frame that carries them and what each kind may hold."""
