"""Models that others wrote, trained on sequences that are split over ranks: Hugging Face transformers."""
