"""The command line `fedpriv ...`: a file for each group of commands; `_command` makes commands of plain functions."""
