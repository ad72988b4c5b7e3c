// Package ci tests the scripts of the build chain (build/ and .ci/) with stubs
// in place of the system's package manager. The test driver itself is in
// runtests. It knows no product package.
package ci
