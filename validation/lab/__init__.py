"""Predictions against the lab: emulated clusters whose links are limited and whose ranks share this machine's cores.

``trials`` is what is measured, ``model`` turns a measured trial into a described cluster, ``compare`` fits the few
figures of the lab that no file states on some trials and predicts all others, ``__main__`` is ``make validate``.
"""
