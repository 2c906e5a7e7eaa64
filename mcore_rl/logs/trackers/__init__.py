"""Trackers of experiments, behind one interface; their packages are imported only where asked."""
