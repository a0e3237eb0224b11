"""Predictions against what is known: the paper's figures (``paper``), the lab (``lab``), and what they say of clusters
that nobody here has (``scaling``)."""
