"""Answers of a model to questions, scored (`deepinfer eval`), and its speed under load (`deepinfer sweep`)."""
