"""`mcore-rl view`: a local web page that shows runs from the files of their folders."""
