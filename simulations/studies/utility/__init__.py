"""What the recipes are worth beside what a user would do without a federation: results/utility.md."""
