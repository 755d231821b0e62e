"""What coordinator and data holder need to run a federation on their own machines: keys, certificates, checks."""
