package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
	keel "github.com/keelstate/keelstate/client"
)

func (a *app) participantCommand() *cobra.Command {
	c := &cobra.Command{Use: "participant", Short: "Show and forget the jobs whose positions checkpoints keep",
		Example: "  keelctl participant list"}
	c.AddCommand(a.participantList(), a.participantRemove())
	return c
}

func (a *app) participantList() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List the participants that are registered, alive or not", Args: cobra.NoArgs,
		Long: `list shows who has registered to take part in checkpoints. Each checkpoint waits for
those that are alive. Of one that is not alive the cluster keeps the newest checkpoint
that has its position, beside those that are retained anyway, until it is registered
again and has a newer one, or is removed.`,
		Example: "  keelctl participant list -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			list, err := a.participants(ctx)
			if err != nil {
				return err
			}
			out := a.list("Participant", "participant", "alive", "registered", "checkpoint", "bytes", "restored")
			for _, p := range list {
				if err := out.Add(participantRecord(p)); err != nil {
					return err
				}
			}
			return out.End()
		},
	}
}

func (a *app) participants(ctx context.Context) ([]*keelstatepb.Participant, error) {
	var resp *keelstatepb.ListParticipantsResponse
	err := a.call(ctx, true, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		resp, err = keelstatepb.NewCheckpointsClient(conn).ListParticipants(ctx, &keelstatepb.ListParticipantsRequest{})
		return err
	})
	return resp.GetParticipants(), err
}

func participantRecord(p *keelstatepb.Participant) record {
	checkpoint, bytes, restored := any(nil), any(nil), any(nil) // none
	if l := p.GetLast(); l != nil {
		checkpoint, bytes = l.GetCheckpoint(), l.GetBytes()
	}
	if r := p.GetRestored(); r != nil {
		restored = r.GetCheckpoint()
	}
	return record{{Name: "participant", Value: p.GetParticipant()}, {Name: "alive", Value: p.GetAlive()},
		{Name: "registered", Value: time.UnixMilli(int64(p.GetRegisteredMs())).UTC().Format(time.RFC3339)},
		{Name: "checkpoint", Value: checkpoint}, {Name: "bytes", Value: bytes}, {Name: "restored", Value: restored},
		{Name: "session", Value: p.GetSession(), Wide: true}, {Name: "registeredMs", Value: p.GetRegisteredMs(), Wide: true},
		{Name: "restoredCluster", Value: p.GetRestored().GetCluster(), Wide: true}}
}

func (a *app) participantRemove() *cobra.Command {
	var yes, force bool
	c := &cobra.Command{
		Use: "remove NAME --yes", Short: "Forget a participant whose job is gone, and keep no checkpoint for it any more", Args: cobra.ExactArgs(1),
		Long: `remove forgets a participant's name. The checkpoint that was kept for its position is
then retained no longer than others, so that its job cannot go on from there. A name
whose session lives is refused without --force: its job would fail at the next
checkpoint.`,
		Example:           "  keelctl participant remove flights --yes",
		ValidArgsFunction: a.completeParticipants,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := a.confirm(yes, "forgetting participant "+args[0], args[0]); err != nil {
				return err
			}
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			return a.removeParticipant(ctx, args[0], force)
		},
	}
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	c.Flags().BoolVar(&force, "force", false, "even if its session lives")
	return c
}

func (a *app) removeParticipant(ctx context.Context, name string, force bool) error {
	var was *keelstatepb.Participant
	err := a.call(ctx, true, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		was, err = keelstatepb.NewCheckpointsClient(conn).GetParticipant(ctx, &keelstatepb.GetParticipantRequest{Participant: name})
		return err
	})
	if err != nil {
		return err
	}
	if was.GetSession() == 0 {
		return keel.NewError(keel.ErrNotFound, keel.OutcomeNotApplied, "participant", fmt.Sprintf("no participant %q is registered; see keelctl participant list", name))
	}
	err = a.call(ctx, false, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		_, err := keelstatepb.NewCheckpointsClient(conn).UnregisterParticipant(ctx, &keelstatepb.UnregisterParticipantRequest{Participant: name, EndedOnly: !force})
		return err
	})
	if err != nil {
		return err
	}
	return a.printDone("Removed", participantRecord(was))
}

func (a *app) completeParticipants(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.fromCluster(cmd, typed, func(ctx context.Context) (out []string, err error) {
		list, err := a.participants(ctx)
		for _, p := range list {
			state := "gone"
			if p.GetAlive() {
				state = "alive"
			}
			out = append(out, described(p.GetParticipant(), "%s", state))
		}
		return out, err
	})
}
