"""Checks of the planner's predictions against the paper (``paper``) and the lab (``lab``), and predictions for clusters
that we cannot measure (``scaling``)."""
