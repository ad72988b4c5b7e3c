// Package keelstatepb is the generated code of api/proto: the messages and
// services of the client API. `make proto` writes every file of it but this
// one; `make proto-check` proves that they are up to date.
package keelstatepb
