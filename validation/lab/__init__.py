"""Predictions against the lab: emulated clusters with limited links, whose ranks share this machine's cores.

``trials`` lists the measurements, ``model`` describes the cluster of a measured trial, ``compare`` fits a few of the
lab's figures on some trials and predicts all others, ``__main__`` is ``make validate``.
"""
