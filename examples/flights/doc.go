// Command flights counts US domestic flights into keyed state of every kind by
// origin airport, exactly once, and reports what the cluster holds. It can be
// killed and started again at any time; package job says how it resumes.
//
// States of the keyspace (key: the origin):
//
//	generation     Value        number and name of the newest run (key: newest)
//	position       Value        how far the origin was counted, and by which run
//	last           Value        the newest flight
//	late           List         flights with a delay above 180 minutes
//	destinations   Map          flights to each destination
//	delay_max      Reducing     largest delay
//	distance_sum   Reducing     sum of the distances
//	delay_mean     Aggregating  mean delay
//	by_day         Reducing     flights per day, the day is the namespace
//	turn           Value        with --recovery rollback: which attempt counts (key: newest)
package main
