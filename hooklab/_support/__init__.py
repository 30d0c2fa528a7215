"""What several rooms share. Nothing here imports a room above."""
