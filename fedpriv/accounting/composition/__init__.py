"""The interface of privacy events, and how their costs are composed and converted into an epsilon."""
