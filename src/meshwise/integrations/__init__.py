"""Run the Trainers of transformers and Lightning on all devices."""
