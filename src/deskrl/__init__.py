"""deskrl: RL for desk work."""
