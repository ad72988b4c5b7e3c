package job

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Flight is one row of the input.
type Flight struct {
	// Date is the scheduled departure, local time, in the form of DateLayout.
	Date string `json:"date"`
	// DelayMinutes is negative for a flight that was early.
	DelayMinutes  int64  `json:"delay"`
	DistanceMiles int64  `json:"distance"`
	Origin        string `json:"origin"`
	Destination   string `json:"destination"`
}

// DateLayout is the form of Flight.Date for package time.
const DateLayout = "2006/01/02 15:04"

// LateMinutes is the delay above which a flight is listed as late.
const LateMinutes = 180

// maxCodeBytes bounds the name of an airport.
const maxCodeBytes = 64

// Day is the date without the time.
func (f Flight) Day() string {
	day, _, _ := strings.Cut(f.Date, " ")
	return day
}

// fields are the columns that the input must have, in any order and among
// others.
var fields = []string{"date", "delay", "distance", "origin", "destination"}

// parseFlight reads the values of fields, in that order. The error names the
// column.
func parseFlight(v [columns]string) (Flight, error) {
	f := Flight{Date: v[0], Origin: v[3], Destination: v[4]}
	if _, err := time.Parse(DateLayout, f.Date); err != nil {
		return f, fmt.Errorf("date %q is not of the form %s", v[0], DateLayout)
	}
	var err error
	if f.DelayMinutes, err = parseNumber("delay", v[1], -1<<31); err != nil {
		return f, err
	}
	if f.DistanceMiles, err = parseNumber("distance", v[2], 0); err != nil {
		return f, err
	}
	if err := checkCode("origin", f.Origin); err != nil {
		return f, err
	}
	return f, checkCode("destination", f.Destination)
}

func parseNumber(name, text string, least int64) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 32)
	if err != nil || n < least {
		return 0, fmt.Errorf("%s %q is not a whole number from %d to %d", name, text, least, 1<<31-1)
	}
	return n, nil
}

func checkCode(name, text string) error {
	switch {
	case text == "":
		return fmt.Errorf("%s is empty", name)
	case len(text) > maxCodeBytes:
		return fmt.Errorf("%s has %d bytes, at most %d", name, len(text), maxCodeBytes)
	case !utf8.ValidString(text) || strings.ContainsAny(text, ",\"\r\n\x00"):
		return fmt.Errorf("%s %q is no name of an airport", name, text)
	}
	return nil
}
