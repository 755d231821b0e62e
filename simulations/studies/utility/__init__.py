"""The accuracy of the recipes compared with a user's alternatives without a federation: results/utility.md."""
