"""The command line `fedpriv ...`: a file for each group of commands, output.py for what all of them print."""
